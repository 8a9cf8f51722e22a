"""When flows end, in exact fractions and as slowly as the definition reads: nothing here is shared with zosim."""

from __future__ import annotations

from fractions import Fraction


def rates(routes, capacity):
    """Max-min fair rates by the book: raise all alike until a link is full, freeze its flows, repeat."""
    rate = {name: Fraction(0) for name in routes}
    growing = set(routes)
    while growing:
        room = {}
        for link, limit in capacity.items():
            demand = sum(routes[name].count(link) for name in growing)
            if demand:
                used = sum(routes[name].count(link) * rate[name] for name in routes)
                room[link] = (limit - used) / demand
        step = min(room.values())
        for name in growing:
            rate[name] += step
        full = {link for link, left in room.items() if left == step}
        growing = {name for name in growing if not full & set(routes[name])}
    return rate


def parts(route, sharing):
    """Cut a route: a fifo link is a part, and so is an unbroken run of others."""
    found = []
    for link in route:
        if sharing[link] == "fifo" or not found or sharing[found[-1][-1]] == "fifo":
            found.append([link])
        else:
            found[-1].append(link)
    return found


def finish_times(scenario):
    """Return exact finish times of a scenario's flows, by id."""
    links = {
        name: value if isinstance(value, dict) else {"bandwidth": value}
        for name, value in scenario["links"].items()
    }
    capacity = {name: Fraction(link["bandwidth"]) for name, link in links.items()}
    latency = {name: Fraction(link.get("latency", 0)) for name, link in links.items()}
    sharing = {name: link.get("sharing", "maxmin") for name, link in links.items()}
    route = {flow["id"]: parts(flow["route"], sharing) for flow in scenario["flows"]}
    size = {flow["id"]: Fraction(flow["bytes"]) for flow in scenario["flows"]}
    order = [flow["id"] for flow in scenario["flows"]]
    due = [(Fraction(flow.get("start", 0)), flow["id"], 0) for flow in scenario["flows"]]
    fluid, queues, finish = {}, {name: [] for name in links}, {}
    now = Fraction(0)
    while due or fluid or any(queues.values()):
        running = {name: route[name][part] for name, (part, _) in fluid.items()}
        running |= {queue[0][0]: [link] for link, queue in queues.items() if queue}
        now_rates = rates(running, capacity)
        left = {name: remaining for name, (_, remaining) in fluid.items()}
        left |= {queue[0][0]: queue[0][2] for queue in queues.values() if queue}
        steps = [left[name] / now_rates[name] for name in running] + [time - now for time, _, _ in due]
        step = min(steps)
        now += step
        for name, (part, remaining) in list(fluid.items()):
            fluid[name] = part, remaining - step * now_rates[name]
        for queue in queues.values():
            if queue:
                queue[0][2] -= step * now_rates[queue[0][0]]
        for name, (part, remaining) in list(fluid.items()):
            if remaining == 0:
                del fluid[name]
                due.append((now + sum(latency[link] for link in route[name][part]), name, part + 1))
        for link, queue in queues.items():
            if queue and queue[0][2] == 0:
                name, part, _ = queue.pop(0)
                due.append((now + latency[link], name, part + 1))
        arrived = sorted((item for item in due if item[0] == now), key=lambda item: order.index(item[1]))
        due = [item for item in due if item[0] > now]
        for time, name, part in arrived:
            if part == len(route[name]):
                finish[name] = time
            elif sharing[route[name][part][0]] == "fifo":
                queues[route[name][part][0]].append([name, part, size[name]])
            else:
                fluid[name] = part, size[name]
    return finish
