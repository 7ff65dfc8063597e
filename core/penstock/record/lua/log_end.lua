-- Read the last entry of a log: number of tokens, rolling hash after them, whether the end is there. Scripts that claim
-- begin with this text, because the log decides over the record. An evicting server may have lost one of them, or a
-- refused command may have aborted a script between the two. Without a log the request starts from the beginning.
local function read_log_end(log, tokens, hash, start)
  local found = redis.pcall('XREVRANGE', log, '+', '-', 'COUNT', 1)
  if found.err then return tokens, hash, false end  -- the key is not a log: the append of the first token reports it
  if not found[1] then return 0, start, false end
  local position, part = string.match(found[1][1], '^(%d+)%-(%d)$')
  local rolled = string.match(found[1][2][2], '^{"id":"%d+%-(%x+)"')
  if part == '2' then return tonumber(position), hash, true end
  if part ~= '1' or not rolled then return tokens, hash, false end  -- readers of the log report the damaged entry
  return position + 1, rolled, false
end
