-- A worker gives a request back, unfinished: the next claim need not wait.
--
-- KEYS[1]  record   hash
-- ARGV     epoch, failed (1: the attempt counts; 0: it does not, the worker was told to stop),
--          delivered (1: its delivery goes back to the bus, too; 0: there is none, somebody has to take it over)
--
-- Replies  1 given back, 0 it was lost before
--
-- Crash    before: the lease runs out.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'stage', 'attempts')
if r[1] ~= ARGV[1] or r[2] == 'end' then return 0 end
if ARGV[3] == '1' then
  redis.call('HSET', KEYS[1], 'lease', 0, 'owner', '', 'message', '')
else
  redis.call('HSET', KEYS[1], 'lease', 1, 'owner', '')
end
if ARGV[2] == '0' and tonumber(r[3]) > 0 then redis.call('HINCRBY', KEYS[1], 'attempts', -1) end
return 1
