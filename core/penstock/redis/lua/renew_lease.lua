-- Renew a lease, or take a lease that has no holder.
--
-- KEYS[1]  lease  string, its holder
-- ARGV     holder, duration in ms
--
-- Replies  1 the caller holds the lease, 0 another holder has it

local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
