-- leases: a page of live leases, in the order of their keys.
--
-- Arguments
--   $1 bytea   from this key on, with the store's prefix
--   $2 bytea   up to this one, which is not included
--   $3 bigint  how many at most
-- Result: rows of key and owner in hexadecimal, token, and the microseconds that
-- are left.
--
-- It only reads, and sees what was committed when it began.
SELECT pg_catalog.encode(l.key, 'hex'::pg_catalog.text), pg_catalog.encode(l.owner, 'hex'::pg_catalog.text), l.token,
	CEIL(EXTRACT(EPOCH FROM l.expires_at - pg_catalog.clock_timestamp()) * 1000000::numeric)::bigint AS rest
FROM {table} AS l
WHERE l.key >= $1::pg_catalog.bytea AND l.key < $2::pg_catalog.bytea
	AND l.expires_at > pg_catalog.clock_timestamp()
ORDER BY l.key
LIMIT $3::bigint
