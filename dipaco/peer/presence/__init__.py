"""How do others see this peer, and what does it see of them?"""
