"""What the tests of several folders share: oracles, cases, small models, stand-ins, and programs run as subprocesses."""
