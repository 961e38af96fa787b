"""One module a verb: `run(config)` gives its JSON, `render(result)` the same for people."""
