-- cursor: make the row that keeps the cursor of purges, once.
--
-- Arguments
--   $1 bytea  key of the row
--   $2 bytea  where a walk begins
-- Result: one inserted row, or none if it is there.
--
-- Why it is atomic: the primary key decides. The row never looks like a lease
-- that has ended, and no walk covers its key.
INSERT INTO {table} AS l (key, owner, token, expires_at)
SELECT $1::pg_catalog.bytea, $2::pg_catalog.bytea, 0::bigint, 'infinity'::timestamp with time zone
WHERE NOT EXISTS (SELECT FROM {table} AS c WHERE c.key = $1::pg_catalog.bytea)
ON CONFLICT (key) DO NOTHING
