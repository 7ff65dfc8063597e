
-- Give tokens back, or with a negative number take more. A bucket may be in debt.
--
-- Replies  1

tokens = math.min(max_tokens, tokens + tonumber(ARGV[3]))
save()
return 1
