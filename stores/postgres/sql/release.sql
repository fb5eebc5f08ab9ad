-- release: end the owner's live lease, and tell the waiters, if there are any.
--
-- Arguments
--   $1 bytea  key, with the store's prefix
--   $2 bytea  owner
--   $3 text   channel for notifications
-- Result: one updated row if a lease was ended, none if there was none.
--
-- Why it is atomic: one UPDATE, and the owner is compared under the row's lock.
-- The row stays, with its token, until a purge. If the statement had to wait
-- for the lock, the lease may have expired meanwhile by itself: ending it again
-- changes nothing, for the owner is still the same.
--
-- NOTIFY makes the commits of a database wait for each other, so it is called
-- only while somebody has marked the row as waited for (mark.sql). A mark that
-- is made at the same time is seen: one of the two waits for the other's row
-- lock, and READ COMMITTED then evaluates SET again. Notifying in SET costs
-- nothing if there is no need to; RETURNING would cost 10 us, for the server
-- then stores the result aside.
UPDATE {table} AS l
SET expires_at = CASE
	WHEN l.waited_until > pg_catalog.clock_timestamp()
		AND pg_catalog.pg_notify($3::pg_catalog.text, pg_catalog.encode(l.key, 'hex'::pg_catalog.text))::pg_catalog.text IS NULL
		THEN pg_catalog.clock_timestamp()
	ELSE pg_catalog.clock_timestamp()
END
WHERE l.key = $1::pg_catalog.bytea AND l.owner = $2::pg_catalog.bytea
	AND l.expires_at > pg_catalog.clock_timestamp()
