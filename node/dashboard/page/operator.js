// Changes to the run. The key is read from its field for each request and kept nowhere else.

import { byId, element } from "./dom.js";
import { clock } from "./format.js";

const ARM_MILLISECONDS = 4000;
const CONFIRM = { stop: "Really stop the run?", evict: "Really evict it?", revoke: "Really revoke it?" };

export class Operator {
  constructor() {
    this.armed = null;
    byId("operator").addEventListener("click", (event) => {
      const button = event.target.closest("button[data-action]");
      if (button) this.press(button);
    });
    byId("copy").addEventListener("click", () => this.copy());
    byId("operator-form").addEventListener("submit", (event) => event.preventDefault());
    byId("operator").addEventListener("toggle", () => this.look());
    this.look();
  }

  async look() {
    let answer;
    try {
      answer = await (await fetch("/api/operator")).json();
    } catch {
      return;
    }
    byId("operator").hidden = false;
    byId("operator-form").hidden = !answer.available;
    byId("operator-reason").hidden = answer.available;
    byId("operator-reason").textContent = answer.reason;
  }

  nodes(members) {
    const select = byId("evict-node"), chosen = select.value;
    select.replaceChildren(...members.map((member) => element("option", { value: member.node_id, selected: member.node_id === chosen }, member.name ? `${member.node_id} (${member.name})` : member.node_id)));
  }

  // Fills the field with the page's advice, unless the operator has entered something else.
  propose(settings) {
    const field = byId("setting");
    if (field.value === (this.proposed ?? "")) field.value = settings;
    this.proposed = settings;
  }

  // Irreversible actions need a second press of the same button within a few seconds.
  press(button) {
    const action = button.dataset.action;
    if (CONFIRM[action] && this.armed !== button) {
      this.disarm();
      this.armed = button;
      button.dataset.words = button.textContent;
      button.textContent = CONFIRM[action];
      this.timer = setTimeout(() => this.disarm(), ARM_MILLISECONDS);
      return;
    }
    this.disarm();
    const subject = { evict: byId("evict-node").value, set: byId("setting").value };
    this.ask(action, subject[action] ?? button.dataset.id ?? "");
  }

  disarm() {
    clearTimeout(this.timer);
    if (this.armed) this.armed.textContent = this.armed.dataset.words;
    this.armed = null;
  }

  async copy() {
    byId("join-text").select();
    try {
      await navigator.clipboard.writeText(byId("join-text").value);
      byId("operator-answer").textContent = "copied";
    } catch {
      byId("operator-answer").textContent = "the line is selected: copy it with your keyboard";
    }
  }

  async ask(action, id) {
    const answer = byId("operator-answer");
    const token = action === "token" ? { uses: Number(byId("token-uses").value), ttl: byId("token-ttl").value } : {};
    answer.textContent = "…";
    try {
      const response = await fetch("/api/operator", {
        method: "POST",
        headers: { Authorization: `Bearer ${byId("key").value}`, "X-Thinwire": "1", "Content-Type": "application/json" },
        body: JSON.stringify({ action, id, keep_token: byId("keep-token").checked, ...token }),
      });
      const result = await response.json();
      answer.className = response.ok ? "" : "trouble";
      answer.textContent = result.error ?? result.text ?? "";
      if (result.join_line) {
        byId("join-line").hidden = false;
        byId("join-text").value = result.join_line;
      }
      if (result.tokens) this.tokens(result.tokens);
      else if (response.ok && action === "revoke") this.ask("tokens", "");
    } catch {
      answer.className = "trouble";
      answer.textContent = "the coordinator does not answer";
    }
  }

  tokens(tokens) {
    const rows = tokens.map((token) => {
      const state = token.usable ? `${token.uses} of ${token.uses_allowed} uses, until ${clock(Date.parse(token.expires) / 1000, Date.now() / 1000)}` : token.state;
      const revoke = token.usable ? element("button", { type: "button", class: "danger", "data-action": "revoke", "data-id": token.id }, "Revoke") : null;
      return element("li", {}, element("span", { class: "mono" }, token.id), element("span", { class: "muted" }, state), revoke);
    });
    byId("tokens").replaceChildren(...rows);
  }
}
