"""The known-truth server with all that tests need of one.

Beyond `servers/truth` it speaks the native dialects of TGI, LightLLM and SGLang, fails, cuts and holds back
bytes as a script says, queues and sheds requests, has a prefix cache, and counts late.
"""
