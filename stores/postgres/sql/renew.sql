-- renew: push the end of the owner's live lease to now + ttl.
--
-- Arguments
--   $1 bytea   key, with the store's prefix
--   $2 bytea   owner
--   $3 bigint  ttl in microseconds
-- Result: one updated row if the lease was renewed, none if not.
--
-- Why it is atomic, and why in two steps: an UPDATE that has to wait for the
-- row's lock has read the clock before the wait, and does not look again if the
-- row did not change meanwhile: it would say yes to a lease that expired while
-- it waited. So "mine" locks the row, which nobody can change from then on, and
-- the clock is read after that. Nothing is locked for a stranger.
WITH mine AS MATERIALIZED (
	SELECT l.key, l.expires_at
	FROM {table} AS l
	WHERE l.key = $1::pg_catalog.bytea AND l.owner = $2::pg_catalog.bytea
		AND l.expires_at > pg_catalog.clock_timestamp()
	FOR NO KEY UPDATE
)
UPDATE {table} AS l
SET expires_at = pg_catalog.clock_timestamp() + $3::bigint::double precision * INTERVAL '1 microsecond'
FROM mine
WHERE l.key = $1::pg_catalog.bytea AND mine.expires_at > pg_catalog.clock_timestamp()
