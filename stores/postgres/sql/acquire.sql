-- acquire: one try to take the lease on a key.
--
-- Arguments
--   $1 bytea   key, with the store's prefix
--   $2 bytea   owner
--   $3 bigint  ttl in microseconds
-- Result: one row with one bigint
--   > 0   the token of the lease that was granted
--   0     the lease was granted, but its token must not be used: release it, and
--         look again
--   < 0   somebody has a live lease, for this many microseconds more
--   NULL  neither, for somebody else changed the row at this very moment: look
--         again
--
-- Why it is atomic: one statement, and each way to a grant is decided under a
-- lock. "taken" locks the row, and after a wait READ COMMITTED evaluates the
-- condition and the new values again, clock included, on the row as it is then.
-- An expired row that was only locked by others, and not changed, may be
-- granted with the clock of before the wait: it had expired by then, and the
-- token still exceeds the last one. "fresh" is decided by the primary key.
--
-- Why "fresh" does not ask whether a row was seen, but whether a live lease
-- was: a purge may have deleted the row that this statement's snapshot shows.
--
-- Why the token may be 0: "fresh" reads the clock, and may then have to wait for
-- another session that inserts or deletes the same key. If another lease was
-- granted, ended and purged before the wait was over, that one's token is the
-- greater. But a purge leaves a row alone until a second after the time in its
-- token, so that this cannot have happened if "fresh" was done within a second.
--
-- A try on a held key only reads: no row lock, no row version, no WAL. All
-- operators have an exact match in pg_catalog, so that search_path cannot
-- change their meaning.
WITH taken AS (
	UPDATE {table} AS l
	SET owner = $2::pg_catalog.bytea,
		token = GREATEST(l.token + 1::bigint, (EXTRACT(EPOCH FROM pg_catalog.clock_timestamp()) * 1000000::numeric)::bigint),
		expires_at = pg_catalog.clock_timestamp() + $3::bigint::double precision * INTERVAL '1 microsecond'
	WHERE l.key = $1::pg_catalog.bytea AND l.expires_at <= pg_catalog.clock_timestamp()
	RETURNING l.token
), fresh AS (
	INSERT INTO {table} AS l (key, owner, token, expires_at)
	SELECT $1::pg_catalog.bytea, $2::pg_catalog.bytea,
		(EXTRACT(EPOCH FROM pg_catalog.clock_timestamp()) * 1000000::numeric)::bigint,
		pg_catalog.clock_timestamp() + $3::bigint::double precision * INTERVAL '1 microsecond'
	WHERE NOT EXISTS (SELECT FROM taken)
		AND NOT EXISTS (
			SELECT FROM {table} AS l
			WHERE l.key = $1::pg_catalog.bytea AND l.expires_at > pg_catalog.clock_timestamp()
		)
	ON CONFLICT (key) DO NOTHING
	RETURNING l.token
)
SELECT COALESCE(
	(SELECT t.token FROM taken AS t),
	(
		SELECT CASE
			WHEN (EXTRACT(EPOCH FROM pg_catalog.clock_timestamp()) * 1000000::numeric)::bigint - f.token < 1000000::bigint THEN f.token
			ELSE 0::bigint
		END
		FROM fresh AS f
	),
	(
		SELECT LEAST(-1::bigint, -CEIL(EXTRACT(EPOCH FROM l.expires_at - pg_catalog.clock_timestamp()) * 1000000::numeric)::bigint)
		FROM {table} AS l
		WHERE l.key = $1::pg_catalog.bytea AND l.expires_at > pg_catalog.clock_timestamp()
	)
)
