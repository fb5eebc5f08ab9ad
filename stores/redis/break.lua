#!lua flags=allow-oom
-- Break ends the live lease on a key, whoever holds it, and tells those who wait.
--
--   KEYS[1]  the record of the lock: a hash of owner, nonce, token, until
--   ARGV[1]  retention in milliseconds: the record outlives its lease by it
--   ARGV[2]  nonce of this call; a second delivery of the call carries it too
--   result   the owner, token and microseconds left of the lease that was
--            ended; nothing, an empty list, when there was no live lease
--
-- Atomic because Redis runs a script alone: the lease that it tells of is the one
-- that it ends. The record stays, with its token, as after a release, and the
-- field broken remembers the call and its answer, so that a second delivery gets
-- that, and spares the next lease.

local record = redis.pcall('HMGET', KEYS[1], 'owner', 'token', 'until', 'broken')
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

if record[4] then
  local nonce, was, left, owner = string.match(record[4], '^(%w+) (%d+) (%d+) (.*)$')
  if nonce == ARGV[2] then
    return {owner, tonumber(was), tonumber(left)}
  end
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if ends <= now then
  return {}
end

redis.call('HSET', KEYS[1], 'until', '0', 'broken',
  string.format('%s %.0f %.0f %s', ARGV[2], token, ends - now, record[1]))
redis.call('PEXPIREAT', KEYS[1],
  math.ceil(math.max(now, token) / 1000) + ARGV[1])
redis.pcall('SPUBLISH', KEYS[1], '')
return {record[1], token, ends - now}
