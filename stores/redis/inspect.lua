#!lua flags=allow-oom
-- Inspect reads the live lease on a key.
--
--   KEYS[1]  the record of the lock: a hash of owner, nonce, token, until
--   result   the lease's owner, token and microseconds left; nothing, an empty
--            list, when there is no live lease
--
-- Atomic because Redis runs a script alone: record and clock are of one moment.
-- It writes nothing. It could say so in its first line (no-writes), but then a
-- replica would answer, from data that may be old.

local record = redis.pcall('HMGET', KEYS[1], 'owner', 'token', 'until')
if record.err then
  if string.find(record.err, 'WRONGTYPE', 1, true) then
    return redis.error_reply('FOREIGN ' .. redis.call('TYPE', KEYS[1]).ok)
  end
  return record
end
if not record[2] and redis.call('EXISTS', KEYS[1]) == 0 then
  return {}
end
local token, ends = tonumber(record[2]), tonumber(record[3])
if not (record[1] and token and ends
    and token % 1 == 0 and token > 0 and token < 9007199254740992
    and ends % 1 == 0 and ends >= 0 and ends < 1e17) then
  return redis.error_reply('FOREIGN hash')
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if ends <= now then
  return {}
end
return {record[1], token, ends - now}
