-- Keep a lease, or take it where nobody has it.
--
-- KEYS[1]  lease  string, its holder
-- ARGV     holder, how long it lasts in ms
--
-- Replies  1 it is held, 0 another one has it

local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
