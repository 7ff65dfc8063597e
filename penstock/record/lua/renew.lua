-- A worker that lives keeps its lease, and hears whether the request is to end.
--
-- KEYS[1]  record   hash
-- ARGV     epoch, lease in ms
--
-- Replies  1 renewed, 3 renewed, and somebody asked for the end, 2 over by our own doing (ended, handed off, released),
--          0 fenced
--
-- Crash    the lease runs out.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'cancelled')
if r[1] ~= ARGV[1] then return 0 end
if r[2] == '' then return 2 end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'lease', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2])
return r[3] and 3 or 1
