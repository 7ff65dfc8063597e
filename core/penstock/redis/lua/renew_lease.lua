-- Renew a lease, or take a lease that has no holder.
--
-- KEYS[1]  lease     string, its holder
-- KEYS[2]  told      string: what the holder tells others, if that is given
-- ARGV     holder, duration in ms; with KEYS[2] what it tells, and for how many ms
--
-- Replies  1 the caller holds the lease, 0 another holder has it, and nothing was written

local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if KEYS[2] then redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4]) end
return 1
