-- Whose leases may have run out: requests of dead workers are among them.
--
-- KEYS[1]  held     sorted set, see held.lua
-- ARGV     how many at most, ms until others may look at the same ones
--
-- Replies  request ids
--
-- Crash    after: others look at them a little later.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
for _, id in ipairs(due) do redis.call('ZADD', KEYS[1], now + ARGV[2], id) end
return due
