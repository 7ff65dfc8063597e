
-- Take one request and its tokens from a bucket, both or neither.
--
-- Replies  {1 both were taken or 0 neither, requests left, tokens left}, the last two in thousandths

local wanted = tonumber(ARGV[3])
local is_there = (max_requests == 0 or requests >= 1) and (max_tokens == 0 or tokens >= wanted)
if is_there then
  if max_requests > 0 then requests = requests - 1 end
  if max_tokens > 0 then tokens = tokens - wanted end
  save()
end
return {is_there and 1 or 0, math.floor(requests * 1000), math.floor(tokens * 1000)}
