#!lua flags=allow-oom
-- Release ends the owner's live lease and tells those who wait for the key.
--
--   KEYS[1]  the record of the lock: a hash of owner, nonce, token, until
--   ARGV[1]  owner of the lease
--   ARGV[2]  retention in milliseconds: the record outlives its lease by it
--   result   1: released, 0: there was no lease of this owner
--
-- Atomic because Redis runs a script alone: the owner that was compared is
-- still there when the lease is ended, so a successor's lease is never touched.
-- The record stays, with its token, for the next acquisition to count on.
-- Runs when memory is full (allow-oom): it adds nothing. A replica and a
-- failing disk refuse it.

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

if record[1] ~= ARGV[1] or ends == 0 then
  return 0
end

-- The clock is not asked: to end a lease that has just expired, and that nobody
-- has taken, changes nothing for anybody. 0 rather than now, so that a clock
-- that is set back does not bring the lease back to life.
redis.call('HSET', KEYS[1], 'until', '0')

-- The record would be kept until the end that the lease had, and Retention more.
-- Shorten that only if it matters, a call less being what it is worth.
if ends - token > ARGV[2] * 100 then -- a tenth, in microseconds
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  redis.call('PEXPIREAT', KEYS[1],
    math.ceil(math.max(now, token) / 1000) + ARGV[2])
end

-- The channel has the name of the record, so that it lies in the same slot of a
-- cluster whatever braces the key contains. pcall: the lease is over, and a
-- user who may not publish has released it all the same; waiters then poll.
redis.pcall('SPUBLISH', KEYS[1], '')
return 1
