-- Release a lease, so that another process can take it at once.
--
-- KEYS[1]  lease  string, its holder
-- ARGV     holder
--
-- Replies  1 the lease was released, 0 another holder has it, or none

if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
