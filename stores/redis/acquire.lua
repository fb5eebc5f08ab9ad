#!lua
-- Acquire takes the lease on a key if no live one is there.
--
--   KEYS[1]  the record of the lock: a hash of owner, nonce, token, until
--   ARGV[1]  owner that wants the lease
--   ARGV[2]  nonce of this call; a second delivery of the call carries it too
--   ARGV[3]  length of the lease in microseconds
--   ARGV[4]  retention in milliseconds: the record outlives its lease by it
--   result   n > 0: acquired, n is the fencing token
--            n < 0: held, the present lease lives for -n more microseconds
--            error FOREIGN: what is there is no lease
--            error LATE: an earlier delivery of the call won a lease that is over
--
-- Atomic because Redis runs a script alone: between the read of the record and
-- the write no other client gets in. A held key is only read, which costs
-- neither the append-only file nor a replica anything. No flags in the first
-- line: Redis then takes the script for a write and refuses it on a replica,
-- when memory is full and when the disk fails, whatever branch it would take.

local record = redis.pcall('HMGET', KEYS[1], 'owner', 'nonce', 'token', 'until')
if record.err then
  if string.find(record.err, 'WRONGTYPE', 1, true) then
    return redis.error_reply('FOREIGN ' .. redis.call('TYPE', KEYS[1]).ok)
  end
  return record
end

-- The clock of the server decides, read in the same step as the record.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local token = now
-- The same as text: cheaper than to have a number formatted, in each grant.
local text = time[1] .. string.sub('00000' .. time[2], -6)

if record[3] or redis.call('EXISTS', KEYS[1]) == 1 then
  local last, ends = tonumber(record[3]), tonumber(record[4])
  -- Every comparison is false for NaN, so nothing odd gets through.
  if not (record[1] and record[2] and last and ends
      and last % 1 == 0 and last > 0 and last < 9007199254740991
      and ends % 1 == 0 and ends >= 0 and ends < 1e17) then
    return redis.error_reply('FOREIGN hash')
  end
  local again = record[1] == ARGV[1] and record[2] == ARGV[2]
  if ends > now then
    if again then
      return last
    end
    return now - ends
  end
  if again then
    -- A late second delivery: the lease it won is over, and another would
    -- perhaps be held by nobody. Nor would "held" be true.
    return redis.error_reply('LATE')
  end
  if last >= now then
    token = last + 1
    text = token
  end
end

local ends = now + ARGV[3]
redis.call('HSET', KEYS[1],
  'owner', ARGV[1], 'nonce', ARGV[2], 'token', text, 'until', ends)
-- An absolute time, from the same clock as the end: the record must not go
-- before its lease, however long the script was paused. Nor before its token is
-- in the past, for a token ahead of the clock is what makes the next one larger.
redis.call('PEXPIREAT', KEYS[1],
  math.ceil(math.max(ends, token) / 1000) + ARGV[4])
return token
