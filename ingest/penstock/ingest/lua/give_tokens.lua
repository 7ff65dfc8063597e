
-- Return tokens to a bucket, or take more with a negative number. A bucket's tokens may become negative.
--
-- ARGV[4]  tenant
--
-- Replies  1

tokens = math.min(max_tokens, tokens + tonumber(ARGV[3]))
save()
if KEYS[2] then redis.call('HINCRBY', KEYS[2], 'tokens ' .. ARGV[4], -tonumber(ARGV[3])) end
return 1
