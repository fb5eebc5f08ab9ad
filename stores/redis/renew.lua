#!lua flags=allow-oom
-- Renew pushes the end of the owner's live lease to now + ttl.
--
--   KEYS[1]  the record of the lock: a hash of owner, nonce, token, until
--   ARGV[1]  owner of the lease
--   ARGV[2]  length of the lease in microseconds, counted from now
--   ARGV[3]  retention in milliseconds: the record outlives its lease by it
--   result   1: renewed, 0: there is no live lease of this owner
--
-- Atomic because Redis runs a script alone: the owner and the end that were
-- compared are still there when the new end is written. Runs when memory is
-- full (allow-oom): it adds nothing, and a holder must not lose its lease
-- because others filled the server. A replica and a failing disk refuse it.

local record = redis.pcall('HMGET', KEYS[1], 'owner', 'token', 'until')
if record.err then
  if string.find(record.err, 'WRONGTYPE', 1, true) then
    return redis.error_reply('FOREIGN ' .. redis.call('TYPE', KEYS[1]).ok)
  end
  return record
end
if not record[2] and redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
local token, ends = tonumber(record[2]), tonumber(record[3])
if not (record[1] and token and ends
    and token % 1 == 0 and token > 0 and token < 9007199254740992
    and ends % 1 == 0 and ends >= 0 and ends < 1e17) then
  return redis.error_reply('FOREIGN hash')
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if record[1] ~= ARGV[1] or ends <= now then
  return 0
end

ends = now + ARGV[2]
redis.call('HSET', KEYS[1], 'until', ends)
redis.call('PEXPIREAT', KEYS[1],
  math.ceil(math.max(ends, token) / 1000) + ARGV[3])
return 1
