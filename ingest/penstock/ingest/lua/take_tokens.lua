
-- Take one request and its tokens from a bucket, both or neither.
--
-- ARGV[4]  tenant
--
-- Replies  {1 both were taken or 0 neither, requests left, tokens left}, the last two in thousandths

local wanted = tonumber(ARGV[3])
local is_there = (max_requests == 0 or requests >= 1) and (max_tokens == 0 or tokens >= wanted)
if is_there then
  if max_requests > 0 then requests = requests - 1 end
  if max_tokens > 0 then tokens = tokens - wanted end
  save()
  if KEYS[2] then
    redis.call('HINCRBY', KEYS[2], 'requests ' .. ARGV[4], 1)
    redis.call('HINCRBY', KEYS[2], 'tokens ' .. ARGV[4], wanted)
  end
end
return {is_there and 1 or 0, math.floor(requests * 1000), math.floor(tokens * 1000)}
