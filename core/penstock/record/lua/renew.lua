-- Renew a worker's session, and note the partitions that the worker reads. The reply has the cancellations of requests
-- that the session holds.
--
-- KEYS[1]  sessions  sorted set, see claim.lua
-- KEYS[2]  news      list, the session's
-- KEYS[3]  readers   hash, the pipeline's: the session that reads each partition; '' if the partition does not progress
-- ARGV     session, lease in ms, time of expiry that the worker knows (0: a new session), number of partitions that it
--          reads, these partitions, partitions that it does not read any more
--
-- Replies  {time of expiry, now, news…}, times in ms, or
--          {}  the session has ended, or the server lost its last renewal and perhaps claims with it: open a new
--              session
--
-- Crash    the session expires. A worker that missed news learns of the cancellation from its next append.

local known, lasts = tonumber(ARGV[3]), redis.call('ZSCORE', KEYS[1], ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- A renewal never reaches so far ahead: the clock went back since, and a reap may have shortened the session.
local went_back = known > now + 1.5 * ARGV[2]
if known > 0 and (not lasts or (tonumber(lasts) < known and not went_back)) then return {} end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
for i = 5, 4 + ARGV[4] do redis.call('HSET', KEYS[3], ARGV[i], ARGV[1]) end
for i = 5 + ARGV[4], #ARGV do
  if redis.call('HGET', KEYS[3], ARGV[i]) == ARGV[1] then redis.call('HSET', KEYS[3], ARGV[i], '') end
end
local reply = {now + ARGV[2], now}
for _, word in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do reply[#reply + 1] = word end
redis.call('DEL', KEYS[2])
return reply
