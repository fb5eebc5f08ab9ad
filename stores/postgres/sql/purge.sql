-- purge: walk some rows on along the primary key, and delete the old ones.
--
-- Arguments
--   $1 bytea   key of the row that keeps the cursor
--   $2 bytea   where a walk begins: at or below the first key
--   $3 bytea   where it ends: above the last key
--   $4 bigint  retention in microseconds
--   $5 bigint  how many rows to walk
-- Result, one row
--   found    bigint  0 if the cursor's row does not exist (cursor.sql makes it),
--                    or another purge has locked it
--   walked   bigint  rows looked at
--   deleted  bigint  rows deleted
--   pages    bigint  size of the table, 0 if found is 0
--
-- The cursor is kept in the table, in the owner of a row whose key no user can
-- have (it begins with a NUL byte), so that programs which acquire one lease in
-- their life purge the whole table together. FOR NO KEY UPDATE SKIP LOCKED on
-- it lets one purge run at a time.
--
-- Why it is safe: a row is deleted under its lock, after its columns have been
-- read again. It must have ended retention ago, nobody waits for it, and its
-- token is a second below the clock: a later acquisition begins with the clock,
-- so tokens go on growing; acquire.sql tells what the second is for. Nothing
-- waits for a row lock.
WITH here AS MATERIALIZED (
	SELECT c.owner AS key, c.tableoid AS relation
	FROM {table} AS c
	WHERE c.key = $1::pg_catalog.bytea
	FOR NO KEY UPDATE SKIP LOCKED
), walk AS MATERIALIZED (
	SELECT l.key
	FROM {table} AS l
	WHERE l.key >= (SELECT h.key FROM here AS h) AND l.key < $3::pg_catalog.bytea
	ORDER BY l.key
	LIMIT $5::bigint
), last AS MATERIALIZED (
	SELECT w.key
	FROM walk AS w
	ORDER BY w.key DESC
	LIMIT 1
), old AS MATERIALIZED (
	SELECT l.key
	FROM {table} AS l
	WHERE l.key >= (SELECT h.key FROM here AS h) AND l.key <= (SELECT w.key FROM last AS w)
		AND l.expires_at < pg_catalog.clock_timestamp() - $4::bigint::double precision * INTERVAL '1 microsecond'
		AND l.waited_until < pg_catalog.clock_timestamp()
		AND l.token < (EXTRACT(EPOCH FROM pg_catalog.clock_timestamp()) * 1000000::numeric)::bigint - 1000000::bigint
	FOR UPDATE SKIP LOCKED
), gone AS (
	DELETE FROM {table} AS l
	WHERE l.key = ANY (ARRAY(SELECT o.key FROM old AS o))
	RETURNING l.key
), moved AS (
	UPDATE {table} AS c
	SET owner = next.key
	FROM (
		SELECT CASE WHEN (SELECT pg_catalog.count(*) FROM walk) < $5::bigint
			THEN $2::pg_catalog.bytea ELSE (SELECT w.key FROM last AS w) END AS key
		FROM here
	) AS next
	WHERE c.key = $1::pg_catalog.bytea AND c.owner <> next.key
)
SELECT (SELECT pg_catalog.count(*) FROM here) AS found,
	(SELECT pg_catalog.count(*) FROM walk) AS walked,
	(SELECT pg_catalog.count(*) FROM gone) AS deleted,
	COALESCE((SELECT pg_catalog.pg_relation_size(h.relation) / pg_catalog.current_setting('block_size')::bigint FROM here AS h), 0::bigint) AS pages
