"""How long programs take: events on a clock by three engines that agree, and the closed form beside them."""
