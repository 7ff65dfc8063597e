-- Common beginning of the rate-limit scripts. A bucket holds the requests and tokens that a tenant may use in a minute.
-- It refills by the server's clock, so that all gateways agree.
--
-- KEYS[1]  bucket  hash: `requests` and `tokens` that are left, and `at`, the time of these figures
-- KEYS[2]  used    where there are regions, for scripts that take or give: what tenants used in this one
-- ARGV     requests a minute (0: no limit), tokens a minute (0: no limit), tokens

local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local saved = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local passed = math.max(0, now - (tonumber(saved[3]) or now))
local function level(text, limit)
  return math.min(limit, (tonumber(text) or limit) + passed * limit / 60)
end
local max_requests, max_tokens = tonumber(ARGV[1]), tonumber(ARGV[2])
local requests, tokens = level(saved[1], max_requests), level(saved[2], max_tokens)
local function save()
  local full = 1
  if max_requests > 0 then full = math.max(full, (max_requests - requests) * 60 / max_requests) end
  if max_tokens > 0 then full = math.max(full, (max_tokens - tokens) * 60 / max_tokens) end
  local text = function(number) return string.format('%.6f', number) end
  redis.call('HSET', KEYS[1], 'requests', text(requests), 'tokens', text(tokens), 'at', text(now))
  redis.call('EXPIRE', KEYS[1], math.ceil(full) + 1)
end
