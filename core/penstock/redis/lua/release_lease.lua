-- Give a lease back: another one may take it at once.
--
-- KEYS[1]  lease  string, its holder
-- ARGV     holder
--
-- Replies  1 it was held and is free, 0 another one has it, or nobody

if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
