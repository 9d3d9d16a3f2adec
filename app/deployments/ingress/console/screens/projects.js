import { html } from "../core.js"; import { Page } from "../ui.js"; export default () => html`<${Page} title="Soon" />`;
