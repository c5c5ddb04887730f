// What the planner would change, and why: the one that decides, and how many stand by.

import { h, milliseconds, number, percent, setText } from "./dom.js";

export function planner(section) {
  const state = h("p");
  const plan = h("p");
  const figures = h("p", { class: "detail" });
  section.append(state, plan, figures);
  return ({ snapshot }) => {
    const [leader, ...others] = snapshot?.planners ?? [];
    if (!leader) return false;
    const mode = leader.is_paused ? "paused" : leader.mode;
    const standing = others.length ? ` · ${number(others.length)} more stand by` : "";
    const held = leader.held.length ? ` · held by hand: ${leader.held.join(", ")}` : "";
    setText(state, `${mode} · fleet ${leader.shape || "–"} · ${number(leader.num_changes)} changes${standing}${held}`);
    const action = leader.actions[0];
    const what = action ? [action.type, action.worker_id, action.role].filter(Boolean).join(" ") : "";
    setText(plan, leader.problem || (action ? `${what}: ${action.reason}` : "nothing decided yet"));
    setText(figures, action ? sentence(action.numbers) : "");
    return true;
  };
}

function sentence(numbers) {
  return [
    `${number(numbers.requests_per_s, 2)} requests/s`,
    `${number(numbers.uncached_tokens)} tokens to prefill, ${number(numbers.answer_tokens)} to answer`,
    `prefill ${percent(numbers.prefill_utilisation, 1)}, decode ${percent(numbers.decode_utilisation, 1)} used`,
    `expected: first token ${milliseconds(1e3 * numbers.ttft_s)}, between tokens ${milliseconds(1e3 * numbers.itl_s)}`,
  ].join(" · ");
}
