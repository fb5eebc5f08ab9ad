-- break: end the live lease on a key whoever holds it, and tell the waiters.
--
-- Arguments
--   $1 bytea  key, with the store's prefix
--   $2 text   channel for notifications
-- Result: one row of key and owner in hexadecimal, token, and the microseconds that
-- were left; none if there was no live lease.
--
-- Why it is atomic: "was" locks the row, so that what is shown is what was
-- ended; the clock is read again after that. Otherwise as release.sql.
WITH was AS MATERIALIZED (
	SELECT l.key, l.owner, l.token, l.expires_at
	FROM {table} AS l
	WHERE l.key = $1::pg_catalog.bytea AND l.expires_at > pg_catalog.clock_timestamp()
	FOR NO KEY UPDATE
)
UPDATE {table} AS l
SET expires_at = CASE
	WHEN l.waited_until > pg_catalog.clock_timestamp()
		AND pg_catalog.pg_notify($2::pg_catalog.text, pg_catalog.encode(l.key, 'hex'::pg_catalog.text))::pg_catalog.text IS NULL
		THEN pg_catalog.clock_timestamp()
	ELSE pg_catalog.clock_timestamp()
END
FROM was
WHERE l.key = $1::pg_catalog.bytea AND was.expires_at > pg_catalog.clock_timestamp()
RETURNING pg_catalog.encode(was.key, 'hex'::pg_catalog.text), pg_catalog.encode(was.owner, 'hex'::pg_catalog.text), was.token,
	CEIL(EXTRACT(EPOCH FROM was.expires_at - pg_catalog.clock_timestamp()) * 1000000::numeric)::bigint AS rest
