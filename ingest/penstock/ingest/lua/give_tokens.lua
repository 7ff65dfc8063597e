
-- Return tokens to a bucket, or take more with a negative number. A bucket's tokens may become negative.
--
-- Replies  1

tokens = math.min(max_tokens, tokens + tonumber(ARGV[3]))
save()
return 1
