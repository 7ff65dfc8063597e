-- A worker gives a request back, unfinished. Its message stays, so whoever has the delivery claims it, or somebody takes
-- it, whatever becomes of the delivery.
--
-- KEYS[1]  record   hash
-- KEYS[2]  free     sorted set, the stage's, see claim.lua
-- ARGV     id, epoch, failed (1: the attempt counts; 0: it does not, the worker was told to stop), ms to leave it alone
--          before it is tried again, ms after that in which only who has the delivery gets it, what `held` keys look like
--
-- Replies  1 given back, 0 it was lost or given back before, or is over: a client that lost the reply sends it again
--
-- Crash    before: the session runs out, and the request is free then.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'stage', 'attempts', 'session')
if r[1] ~= ARGV[2] or r[2] == 'end' or r[2] == 'handed' or (r[4] or '') == '' then return 0 end
local time = redis.call('TIME')
local from = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[4]
redis.call('SREM', string.format(ARGV[6], r[4]), ARGV[1])
redis.call('HSET', KEYS[1], 'session', '', 'not_before', ARGV[4] == '0' and 0 or from)
redis.call('ZADD', KEYS[2], from + ARGV[5], ARGV[1])
if ARGV[3] == '0' and tonumber(r[3]) > 0 then redis.call('HINCRBY', KEYS[1], 'attempts', -1) end
return 1
