-- Take over the entries of dead members: their key expired, or holds another token than their consumer's name.
--
-- KEYS     the streams that the group reads. It also reads the members' keys.
-- ARGV     group, own consumer, what member keys begin with, then for each stream how many entries may be taken
--
-- Replies  for each stream the entries taken

local group, me, prefix = ARGV[1], ARGV[2], ARGV[3]
local taken = {}
for i, stream in ipairs(KEYS) do
  local room = tonumber(ARGV[3 + i])
  taken[i] = {}
  for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
    local info = {}
    for j = 1, #flat, 2 do info[flat[j]] = flat[j + 1] end
    local name, token = string.match(info.name, '^(.*)/([^/]*)$')
    if info.name ~= me and name and redis.call('GET', prefix .. name) ~= token then
      if info.pending == 0 then
        redis.call('XGROUP', 'DELCONSUMER', stream, group, info.name)
      elseif room > 0 then
        local ids = {}
        for _, row in ipairs(redis.call('XPENDING', stream, group, '-', '+', room, info.name)) do
          table.insert(ids, row[1])
        end
        for _, entry in ipairs(redis.call('XCLAIM', stream, group, me, 0, unpack(ids))) do
          if entry then
            table.insert(taken[i], entry)
            room = room - 1
          end
        end
      end
    end
  end
end
return taken
