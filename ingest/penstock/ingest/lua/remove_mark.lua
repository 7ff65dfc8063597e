-- Remove a kept response's mark, unless it was changed meanwhile.
--
-- KEYS[1]  marks  hash, by response id
-- ARGV     response id, the mark to remove
--
-- Replies  1 it is removed, 0 there is another one, or none

if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
