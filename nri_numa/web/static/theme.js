// Light and dark: as the system wants it, or as the button was set. Shared by all pages of the agent.

const KEY = "nri-numa-theme";
const darkMedia = matchMedia("(prefers-color-scheme: dark)");

function asked() {
  try { return localStorage.getItem(KEY) || "auto"; } catch { return "auto"; }
}

function dress() {
  const theme = asked();
  document.documentElement.dataset.theme = theme === "auto" ? (darkMedia.matches ? "dark" : "light") : theme;
  const button = document.getElementById("theme");
  if (button && button.textContent !== `Theme: ${theme}`) button.textContent = `Theme: ${theme}`;
}

darkMedia.addEventListener("change", dress);
document.getElementById("theme")?.addEventListener("click", () => {
  const next = { auto: "light", light: "dark", dark: "auto" }[asked()];
  try {
    if (next === "auto") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, next);
  } catch { /* private mode */ }
  dress();
});
dress();
