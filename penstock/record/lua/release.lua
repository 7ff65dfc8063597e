-- A worker gives a request back, unfinished. Its message stays, so whoever has the delivery claims it, or somebody takes
-- it over, whatever becomes of the delivery.
--
-- KEYS[1]  record   hash
-- ARGV     epoch, failed (1: the attempt counts; 0: it does not, the worker was told to stop),
--          ms to leave it alone before it is tried again
--
-- Replies  1 given back, 0 it was lost before, or is over
--
-- Crash    before: the lease runs out. After, and before the request is named in the list again (held.lua): it is named
--          there since it was claimed.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'stage', 'attempts')
if r[1] ~= ARGV[1] or r[2] == 'end' or r[2] == 'handed' then return 0 end
local lease = 1
if ARGV[3] ~= '0' then
  local time = redis.call('TIME')
  lease = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3]
end
redis.call('HSET', KEYS[1], 'lease', lease, 'owner', '')
if ARGV[2] == '0' and tonumber(r[3]) > 0 then redis.call('HINCRBY', KEYS[1], 'attempts', -1) end
return 1
