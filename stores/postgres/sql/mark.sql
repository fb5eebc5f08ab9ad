-- mark: let the releases of these keys notify, for some time.
--
-- Arguments
--   $1 bytea[]  keys, with the store's prefix
--   $2 bigint   how long the marks are to last, in microseconds
--   $3 bigint   a mark that lasts at least this long need not be renewed, in
--               microseconds
-- Result: bigint, how many of the keys are marked for at least $3 now. A row
-- that somebody else had locked is left out: look again.
--
-- Why it is atomic: a mark is written under the row's lock, and is committed
-- when the statement returns, so that every release which starts after that
-- sees it. A key that has no row gets one without a lease (owner empty, token
-- 0): the first acquisition to come must find the mark.
--
-- Nothing here waits for a row lock, and rows are inserted in the order of
-- their keys, so that marks for many keys cannot deadlock. Of any number of
-- waiters only the first one in $2 - $3 writes.
WITH seen AS MATERIALIZED (
	SELECT l.key, l.waited_until >= pg_catalog.clock_timestamp() + $3::bigint::double precision * INTERVAL '1 microsecond' AS ready
	FROM {table} AS l
	WHERE l.key = ANY ($1::pg_catalog.bytea[])
), due AS MATERIALIZED (
	SELECT l.key
	FROM {table} AS l
	WHERE l.key = ANY (ARRAY(SELECT s.key FROM seen AS s WHERE NOT s.ready))
	FOR NO KEY UPDATE SKIP LOCKED
), marked AS (
	UPDATE {table} AS l
	SET waited_until = pg_catalog.clock_timestamp() + $2::bigint::double precision * INTERVAL '1 microsecond'
	WHERE l.key = ANY (ARRAY(SELECT d.key FROM due AS d))
	RETURNING l.key
), fresh AS (
	INSERT INTO {table} AS l (key, owner, token, expires_at, waited_until)
	SELECT k.key, ''::pg_catalog.bytea, 0::bigint, 'epoch'::timestamp with time zone,
		pg_catalog.clock_timestamp() + $2::bigint::double precision * INTERVAL '1 microsecond'
	FROM pg_catalog.unnest($1::pg_catalog.bytea[]) AS k (key)
	WHERE NOT EXISTS (SELECT FROM seen AS s WHERE s.key = k.key)
	ORDER BY k.key
	ON CONFLICT (key) DO NOTHING
	RETURNING l.key
)
SELECT (SELECT pg_catalog.count(*) FROM seen AS s WHERE s.ready)
	+ (SELECT pg_catalog.count(*) FROM marked)
	+ (SELECT pg_catalog.count(*) FROM fresh)
