"use strict";
document.documentElement.classList.add("js");
try {
  const theme = localStorage.getItem("orthomerge-theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
} catch { /* a page from disk may have no storage */ }
