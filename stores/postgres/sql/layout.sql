-- layout: what there is under the name of the table.
--
-- Arguments
--   $1 text  schema
--   $2 text  table
-- Result: one row if a relation of that name exists, none if not
--   columns  text     names and types of its columns, in the order of the names
--   keyed    boolean  whether "key" alone is unique
SELECT pg_catalog.array_to_string(ARRAY(
		SELECT a.attname::pg_catalog.text || ' '::pg_catalog.text || pg_catalog.format_type(a.atttypid, a.atttypmod)
		FROM pg_catalog.pg_attribute AS a
		WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
		ORDER BY a.attname
	), ', '::pg_catalog.text) AS columns,
	EXISTS (
		SELECT
		FROM pg_catalog.pg_index AS i
		JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
		WHERE i.indrelid = c.oid AND i.indisunique AND i.indnkeyatts = 1 AND i.indpred IS NULL
			AND a.attname = 'key'::pg_catalog.text
	) AS keyed
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1::pg_catalog.text AND c.relname = $2::pg_catalog.text
