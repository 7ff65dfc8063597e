-- Remove a kept response's mark, unless the mark has changed since the caller read it.
--
-- KEYS[1]  marks  hash, by response id
-- ARGV     response id, the mark to remove
--
-- Replies  1 the mark is removed, 0 the response has another mark, or none

if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
