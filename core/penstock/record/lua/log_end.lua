-- What a log says of its request: number of tokens, hash behind them, whether the end is there. Scripts that claim begin
-- with this text: the log is the authority, and a server that evicts may have lost the log or the record, or a refused
-- command have ended a script between the two. Without a log the request begins anew; else the last entry counts.
local function read_log_end(log, tokens, hash, start)
  local found = redis.pcall('XREVRANGE', log, '+', '-', 'COUNT', 1)
  if found.err then return tokens, hash, false end  -- it is no log: the first token finds that
  if not found[1] then return 0, start, false end
  local position, part = string.match(found[1][1], '^(%d+)%-(%d)$')
  local rolled = string.match(found[1][2][2], '^{"id":"%d+%-(%x+)"')
  if part == '2' then return tonumber(position), hash, true end
  if part ~= '1' or not rolled then return tokens, hash, false end  -- who reads the log finds what is damaged
  return position + 1, rolled, false
end
