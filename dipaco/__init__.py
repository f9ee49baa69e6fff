"""A peer-to-peer volunteer network that trains one modular language model (DiPaCo).

Others can rely on the commands, on the keys of a RUN.toml, and on the files and messages that
`docs/protocol.md` describes. In Python, `routing.run_folder.RunFolder` opens a prepared run, and
`simulator.reference.ReferenceSwarm` trains it in one process. All other names are internal and may
change.
"""
