"""Who may do what with an article. Inactive users may do nothing."""

from models import EDITOR


def can_read(user, article):
    """Published articles are public; others are for the staff."""
    if article.status == "published":
        return True
    return user.active and (user == article.author or user.has(EDITOR))


def can_approve(user, article):
    """Editors approve what others wrote, once each."""
    if not user.active or not user.has(EDITOR):
        return False
    return user != article.author and user.name not in article.approvals


def can_publish(user, article, needed=2):
    """Editors publish an article in review that enough others approved."""
    if not user.active or article.status != "review":
        return False
    return user.has(EDITOR) or len(article.approvals) >= needed


def approve(user, article):
    """Add an approval. Raises PermissionError."""
    if not can_approve(user, article):
        raise PermissionError(f"{user.name} may not approve this article")
    article.approvals.append(user.name)


def publish(user, article):
    """Make an article public. Raises PermissionError."""
    if not can_publish(user, article):
        raise PermissionError(f"{user.name} may not publish this article")
    article.status = "published"
