"""What a recorded server was asked and answered, of `kcap record --agent-trace`, and a trace sent as a load.

Inside the server's process: `middleware` sees the bytes of each request and answer go by and changes none; `relay`
brings them to the process of `kcap record`. There `exchange` makes a Turn of them: roles, lengths, tools, tokens, times
and, if asked for, texts; `log` knows which conversation it goes on, and writes its line. `blocks` are of the prompts'
tokens, in the processes of the model. `load` makes requests of the turns of a trace (`kcap record --workload`), and
`sender` sends them to a server or an engine.
"""
