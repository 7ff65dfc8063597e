-- A worker that lives keeps its lease.
--
-- KEYS[1]  record   hash
-- ARGV     epoch, lease in ms
--
-- Replies  1 renewed, 2 over by our own doing (ended, handed off, released), 0 fenced
--
-- Crash    the lease runs out.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'owner')
if r[1] ~= ARGV[1] then return 0 end
if r[2] == '' then return 2 end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'lease', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2])
return 1
