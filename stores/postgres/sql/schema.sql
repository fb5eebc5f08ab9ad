-- The table of leasekit's leases, one row a key. Running it again is harmless.
--
-- key and owner are bytea, so that every key works in a database of any
-- encoding, and keys that differ in one byte are different under any collation.
-- To read them: SELECT encode(key, 'escape'), encode(owner, 'escape'), …
--
-- Leases are updated in place. There is no index but the primary key, and half
-- of each page is left empty, so that new row versions stay on their page and
-- touch no index (HOT). Please add no index on the other columns.
CREATE TABLE IF NOT EXISTS {table} (
	-- The store's prefix and the key. A key that begins with a NUL byte belongs
	-- to the purge, which keeps its position there.
	key pg_catalog.bytea NOT NULL,
	-- Who holds the lease, or held it last. Empty: nobody ever did.
	owner pg_catalog.bytea NOT NULL,
	-- Fencing token of the present or the last lease.
	token bigint NOT NULL,
	-- When the lease ends or ended. It is live while this is in the future.
	expires_at timestamp with time zone NOT NULL,
	-- Until then a release notifies, because somebody waits for the key.
	waited_until timestamp with time zone NOT NULL DEFAULT 'epoch',
	PRIMARY KEY (key)
) WITH (fillfactor = 50);
