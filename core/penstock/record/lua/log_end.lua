-- The state of a request's log beside that of its record: the log is the authority on the tokens, and a server that evicts
-- may have lost either of the two. Scripts that claim begin with this text.
--
-- log      the key, with the record's number of tokens, its hash behind them, and the hash before the first token
--
-- Returns  the number of tokens, the hash, and whether the end is there. Without a log there are none: the request begins
--          anew. Without a record, or where a refused command ended a script halfway, they are those of the last entry.

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
