"""What does every process of the swarm have, training or not, and how does it come in?"""
