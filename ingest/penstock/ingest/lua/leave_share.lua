-- Release the tokens that a ticket reserves. A second call for the same ticket changes nothing.
--
-- KEYS     as in enter_share.lua
-- ARGV     ticket, tenant, tokens
--
-- Replies  1

if redis.call('ZREM', KEYS[1], ARGV[1]) == 1 and redis.call('HINCRBY', KEYS[2], ARGV[2], -ARGV[3]) <= 0 then
  redis.call('HDEL', KEYS[2], ARGV[2])
  redis.call('HDEL', KEYS[3], ARGV[2])
end
return 1
