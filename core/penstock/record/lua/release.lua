-- Release an unfinished request. The record keeps its message: the worker that holds the delivery claims the request,
-- or another worker takes it over, also if the delivery is lost.
--
-- KEYS[1]  record   hash
-- KEYS[2]  free     sorted set, the stage's, see claim.lua
-- ARGV     id, epoch, failed (1: the attempt counts; 0: it does not, the worker shuts down), ms to wait before the next
--          attempt, ms after that in which only the holder of the delivery may claim it, format of `held` keys
--
-- Replies  1 released; 0 the claim was lost, was released before, or the request is over. A client that lost the reply
--          calls again, and gets 0
--
-- Crash    before: the session expires, and the request is free then.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'stage', 'attempts', 'session')
if r[1] ~= ARGV[2] or r[2] == 'end' or r[2] == 'handed' or (r[4] or '') == '' then return 0 end
local time = redis.call('TIME')
local from = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[4]
redis.call('SREM', string.format(ARGV[6], r[4]), ARGV[1])
redis.call('HSET', KEYS[1], 'session', '', 'not_before', ARGV[4] == '0' and 0 or from)
redis.call('ZADD', KEYS[2], from + ARGV[5], ARGV[1])
if ARGV[3] == '0' and tonumber(r[3]) > 0 then redis.call('HINCRBY', KEYS[1], 'attempts', -1) end
return 1
