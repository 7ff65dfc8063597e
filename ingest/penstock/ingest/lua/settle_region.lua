
-- Take from a bucket, or give back to it, what a tenant used in another region since that was settled last. A bucket
-- may owe as much as it holds: after a time in which the region told nothing, no tenant is refused for long.
--
-- KEYS[2]  settled  hash, by `requests <tenant>` and `tokens <tenant>`: what of the other region's counts is settled
-- ARGV[3]  tenant; then its requests and its tokens in the other region, as that counts them
--
-- Replies  1

local function settle(what, told, left, limit)
  local field = what .. ' ' .. ARGV[3]
  local before = tonumber(redis.call('HGET', KEYS[2], field) or 0)
  redis.call('HSET', KEYS[2], field, told)
  return math.max(-limit, math.min(limit, left - (tonumber(told) - before)))
end
requests = settle('requests', ARGV[4], requests, max_requests)
tokens = settle('tokens', ARGV[5], tokens, max_tokens)
save()
return 1
